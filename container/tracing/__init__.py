"""OpenTelemetry's traces: spans of each request, sent over OTLP (docs/operate.md).

Only `endpoint` may be imported while tracing is off; the others import OpenTelemetry.
"""
