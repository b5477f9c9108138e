"""The APIs, a folder each: route (`api`), request fields (`schema`) and response (`answer`).

`generation` holds what the text APIs share, `openai` what OpenAI's APIs share. Imports
`container.http`, `container.schema` and `container.wire`.
"""
