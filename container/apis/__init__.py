"""The APIs, one folder or module each: routes, request fields and responses.

In a folder, these are the modules `api`, `schema` and `response`. The text APIs share `generation`,
OpenAI's APIs share `openai`, and APIs for conversations share `chat.turn` and `chat.blocks`.
Imports `http`, `isolation`, `schema`, `security` and `wire`.
"""
