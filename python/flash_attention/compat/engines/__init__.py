"""Attention of serving engines. vLLM and SGLang find these modules by their entry points; users must select them."""
