"""Between text and tokens, for each model that nodes serve (`models`).

To tokens: `chat` and `tokenizer`, and `generation_request`, what a request asks for, whichever front end it came by. To
text: `detokenizer`, `stops` and `answer`. `answer_reader` finds reasoning and calls in it, and `constraints` what a
grammar must allow for them.
"""
