"""Code shared by all routes: bodies, errors, deadlines, metrics. Imports `schema` and `wire`."""
