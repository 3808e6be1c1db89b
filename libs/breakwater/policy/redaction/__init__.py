"""How secrets and personal data are found in texts and JSON; policy/redact.py is the way in."""
