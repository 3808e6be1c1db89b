"""The servers and the room that a load needs."""
