"""What takes the requests of a fleet: the gateway, and the router that chooses a replica."""
