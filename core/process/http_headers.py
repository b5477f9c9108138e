"""HTTP headers for both of our proxies: a fleet's gateway, and the one before several models."""

HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer",
     "transfer-encoding", "upgrade")
)  # fmt: skip
"""Hop-by-hop headers. They describe a single connection, so proxies drop them (RFC 9110, 7.6.1, and
RFC 2616, 13.5.1)."""
