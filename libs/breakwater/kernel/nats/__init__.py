"""NATS: the topology as data, its provisioning, the broker, publishing with proof, ack rules, dead letters."""
