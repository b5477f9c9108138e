"""The APIs, one folder or module each: routes, request fields and responses.

In a folder these are `api`, `schema` and `response`. `generation` has the code that the text APIs
share, `openai` the code that OpenAI's APIs share, and `chat` what all APIs for conversations share
(`chat.turn`, `chat.blocks`). Imports `container.http`, `container.schema` and
`container.wire`.
"""
