"""Imported by the fork server, so that its forks have what each process makes once: transformers' table of renamed
weights, which has 880 regular expressions, and a router's page of its API."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from router.http import docs_page

get_checkpoint_conversion_mapping("llama")
docs_page.routes()
