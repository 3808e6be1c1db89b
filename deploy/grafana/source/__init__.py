"""What deploy/grafana/dashboards/*.json are made from: `python -m deploy.grafana.source` writes them."""
