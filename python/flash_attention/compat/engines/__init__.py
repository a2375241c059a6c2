"""Attention of serving engines: vLLM and SGLang find these by their entry points. Nothing is active unasked."""
