"""Writes docs/api.md from the code: `python -m tools.api_reference`.

`http` has the endpoints with their fields, from the OpenAPI document that the router serves, and the fields that it
refuses, from the rules by which it does. `grpc` has the messages, from protobuf's descriptors. `covered` says which
test covers what, from tests/docs/covered.toml: what has no test there has an empty cell, and fails
tests/docs/test_api_reference.py.
"""
