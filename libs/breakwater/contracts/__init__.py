"""The public wire contract: every message, subject, stream and header name.

Programs in any language depend on it; `proto/` is generated from it. Imports nothing else of ours.
"""
