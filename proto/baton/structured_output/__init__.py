"""Structured outputs: what a request may ask for (`constraint`), as a grammar for each of the two backends, llguidance
(`guidance`) and XGrammar (`xgrammar_compiler`).
"""
