"""The things on AWS that a deployment makes: buckets, roles, endpoints, alarms, images."""
