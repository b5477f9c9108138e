"""The APIs, one folder or module each: routes, request fields and responses. `table` lists them.

The folder of a text generation API has `api` (its routes), `schema` (its fields) and `response`
(the shapes of its answers). These APIs share `generation`. All but `text` share `openai`, those for
conversations share `chat.turn`, and `anthropic` and `responses` share `chat.blocks`.
Imports `http`, `isolation`, `schema`, `security` and `wire`.
"""
