"""HTTP headers for our two proxies, the front of several models and a fleet's gateway."""

HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer",
     "transfer-encoding", "upgrade")
)  # fmt: skip
"""Hop-by-hop headers. They describe a single connection, so proxies drop them (RFC 9110, 7.6.1)."""
