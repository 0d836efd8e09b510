"""What would block the event loop, because it takes long or may never end: long texts in `threads`, and in processes of
their own what clients write programs in, `grammars` and chat templates (`request_templates`).
"""
