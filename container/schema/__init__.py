"""Tables of request fields: their types, checks and OpenAPI. Imports no other room."""
