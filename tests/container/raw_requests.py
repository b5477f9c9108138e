"""Requests as bytes, in which servers and proxies may see different requests (smuggling).

PATH in a request line stands for a path whose route reads the body as JSON. NEXT is a request that
a server must not see if the request before it is malformed.
"""

from __future__ import annotations

NEXT = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
_POST = b"POST PATH HTTP/1.1\r\nHost: x\r\n"
_CHUNKED = _POST + b"Transfer-Encoding: chunked\r\n"
_CHUNK = b"2\r\n{}\r\n0\r\n\r\n"
_GET = b"GET /ping HTTP/1.1\r\nHost: x\r\n"


def _with_lengths(*values: bytes) -> bytes:
    return _POST + b"".join(b"Content-Length: %s\r\n" % value for value in values) + b"\r\n{}"


def _coded(*lines: bytes) -> bytes:
    return _POST + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + _CHUNK


def _body(chunks: bytes) -> bytes:
    return _CHUNKED + b"\r\n" + chunks


REFUSED: dict[str, tuple[int, bytes]] = {
    "a length with a sign": (400, _with_lengths(b"+2")),
    "a length with an underscore": (400, _with_lengths(b"0_2")),
    "a negative length": (400, _with_lengths(b"-2")),
    "a hexadecimal length": (400, _with_lengths(b"0x2")),
    "a length with a fraction": (400, _with_lengths(b"2.0")),
    "a length with an exponent": (400, _with_lengths(b"2e0")),
    "a length with a superscript digit": (400, _with_lengths(b"\xb2")),
    "a length with a blank inside": (400, _with_lengths(b"2 2")),
    "an empty length": (400, _with_lengths(b"")),
    "a list of equal lengths": (400, _with_lengths(b"2, 2")),
    "a list of different lengths": (400, _with_lengths(b"2, 40")),
    "two equal lengths": (400, _with_lengths(b"2", b"2")),
    "two different lengths": (400, _with_lengths(b"2", b"40")),
    "two different lengths, the longer first": (400, _with_lengths(b"40", b"2")),
    "a length and chunks": (400, _coded(b"Content-Length: 2", b"Transfer-Encoding: chunked")),
    "chunks and a length": (400, _coded(b"Transfer-Encoding: chunked", b"Content-Length: 40")),
    "gzip, chunked": (400, _coded(b"Transfer-Encoding: gzip, chunked")),
    "gzip and chunked in two headers": (
        400, _coded(b"Transfer-Encoding: gzip", b"Transfer-Encoding: chunked")),
    "chunked, gzip": (400, _coded(b"Transfer-Encoding: chunked, gzip")),
    "gzip": (400, _coded(b"Transfer-Encoding: gzip")),
    "identity": (400, _coded(b"Transfer-Encoding: identity")),
    "identity, chunked": (400, _coded(b"Transfer-Encoding: identity, chunked")),
    "chunked, identity": (400, _coded(b"Transfer-Encoding: chunked, identity")),
    "chunked, chunked": (400, _coded(b"Transfer-Encoding: chunked, chunked")),
    "chunked twice": (400, _coded(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked")),
    "an unknown coding": (400, _coded(b"Transfer-Encoding: xchunked")),
    "a coding with a parameter": (400, _coded(b"Transfer-Encoding: chunked;q=1")),
    "a coding in quotes": (400, _coded(b'Transfer-Encoding: "chunked"')),
    "a coding after a vertical tab": (400, _coded(b"Transfer-Encoding: \x0bchunked")),
    "a coding with a NUL": (400, _coded(b"Transfer-Encoding: chunked\0")),
    "no coding": (400, _coded(b"Transfer-Encoding:")),
    "chunks in HTTP/1.0": (
        400, b"POST PATH HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n" + _CHUNK),
    "a blank before the colon": (400, _coded(b"Transfer-Encoding : chunked")),
    "a folded header": (400, _coded(b"X: y", b" Transfer-Encoding: chunked")),
    "a header that begins with a tab": (400, _coded(b"\tTransfer-Encoding: chunked")),
    "lines that end with LF": (400, b"GET /ping HTTP/1.1\nHost: x\n\n"),
    "a request line that ends with LF": (400, b"GET /ping HTTP/1.1\nHost: x\r\n\r\n"),
    "a header that ends with LF": (400, _POST + b"X: y\nContent-Length: 2\r\n\r\n{}"),
    "a CR in a header": (400, _GET + b"X: a\rContent-Length: 2\r\n\r\n"),
    "a NUL in a header": (400, _GET + b"X: a\0b\r\n\r\n"),
    "a header without a colon": (400, _GET + b"nonsense\r\n\r\n"),
    "a header without a name": (400, _GET + b": x\r\n\r\n"),
    "a name with a blank": (400, _GET + b"X Y: x\r\n\r\n"),
    "a name in brackets": (400, _GET + b"(X): x\r\n\r\n"),
    "a name that is not ASCII": (400, _GET + b"X\xe9: x\r\n\r\n"),
    "two hosts": (400, _GET + b"Host: y\r\n\r\n"),
    "no version": (400, b"GET /ping\r\n\r\n"),
    "a version that is no number": (400, b"GET /ping HTTP/x.y\r\nHost: x\r\n\r\n"),
    "a version in lower case": (400, b"GET /ping http/1.1\r\nHost: x\r\n\r\n"),
    "a version of the future": (400, b"GET /ping HTTP/3.0\r\nHost: x\r\n\r\n"),
    "a word after the version": (400, b"GET /ping HTTP/1.1 x\r\nHost: x\r\n\r\n"),
    "two blanks in the request line": (400, b"GET  /ping HTTP/1.1\r\nHost: x\r\n\r\n"),
    "a method that is no word": (400, b"G(T /ping HTTP/1.1\r\nHost: x\r\n\r\n"),
    "a method in lower case": (400, b"get /ping HTTP/1.1\r\nHost: x\r\n\r\n"),
    "a long request line": (414, b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"),
    "a long header": (431, _GET + b"X: " + b"a" * 9000 + b"\r\n\r\n"),
    "many headers": (431, _GET + b"X: y\r\n" * 101 + b"\r\n"),
    "an unknown expectation": (417, _GET + b"Expect: a-lot\r\n\r\n"),
    "a chunk size that is no number": (400, _body(b"zz\r\n{}\r\n0\r\n\r\n")),
    "a chunk size with a sign": (400, _body(b"+2\r\n{}\r\n0\r\n\r\n")),
    "a negative chunk size": (400, _body(b"-2\r\n{}\r\n0\r\n\r\n")),
    "a chunk size with a prefix": (400, _body(b"0x2\r\n{}\r\n0\r\n\r\n")),
    "a chunk size with an underscore": (400, _body(b"0_2\r\n{}\r\n0\r\n\r\n")),
    "a chunk size after a blank": (400, _body(b" 2\r\n{}\r\n0\r\n\r\n")),
    "no chunk size": (400, _body(b"\r\n{}\r\n0\r\n\r\n")),
    "a chunk size that ends with LF": (400, _body(b"2\n{}\r\n0\r\n\r\n")),
    "a chunk that is longer than its size": (400, _body(b"1\r\n{}\r\n0\r\n\r\n")),
    "a chunk that ends with LF": (400, _body(b"2\r\n{}\n0\r\n\r\n")),
    "a length as trailer": (400, _body(b"2\r\n{}\r\n0\r\nContent-Length: 2\r\n\r\n")),
    "a trailer without a colon": (400, _body(b"2\r\n{}\r\n0\r\nnonsense\r\n\r\n")),
}  # fmt: skip
"""Malformed requests, and the status of the refusal."""

ACCEPTED: dict[str, bytes] = {
    "no body": _GET + b"\r\n",
    "a body of no bytes": b"POST /ping HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
    "a body that nobody reads": b"POST /ping HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
    "chunks that nobody reads": b"POST /ping HTTP/1.1\r\nHost: x\r\n"
    b"Transfer-Encoding: Chunked\r\n\r\n" + _CHUNK,
    "a whole URL": b"GET http://x/ping HTTP/1.1\r\nHost: x\r\n\r\n",
    "a script name": _GET + b"SCRIPT_NAME: /x\r\n\r\n",
    "a script name that fits": _GET + b"SCRIPT_NAME: /ping\r\n\r\n",
    "a path in a header": _GET + b"PATH_INFO: /x\r\n\r\n",
    "a length with an underscore in its name": _GET + b"Content_Length: 5\r\n\r\n",
    "a coding with an underscore in its name": _GET + b"Transfer_Encoding: chunked\r\n\r\n",
}
"""Requests that must be answered with 200, and the connection kept."""
