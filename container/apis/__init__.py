"""The APIs, one folder or module each: routes, request fields and responses.

The folder of a text generation API has them in `api`, `schema` and `response`. These APIs share
`generation`. All but `text` share `openai`, those for conversations share `chat.turn`, and
`messages` and `responses` share `chat.blocks`.
Imports `http`, `isolation`, `schema`, `security` and `wire`.
"""
