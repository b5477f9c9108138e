"""What is sent: workloads, plans, arrivals and the requests of a user."""
