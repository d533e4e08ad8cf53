"""Text: tokenizers and chat templates, which run in processes with limits."""
