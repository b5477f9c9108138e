"""Tables of request fields: types, checks and OpenAPI. Imports no other folder of `container`."""
