"""Headers of HTTP that proxies must know: the front of several models, and a fleet's gateway."""

HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer",
     "transfer-encoding", "upgrade")
)  # fmt: skip
"""Headers that concern one connection alone, so that proxies drop them (RFC 9110, 7.6.1)."""
