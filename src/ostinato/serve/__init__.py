"""`ostinato serve`: a model behind OpenAI's endpoints; with the `serve` extra.

`scheduler` (pure) says which request does what next, `engine` is the one thread that owns the
decoder, `protocol` (pure) knows OpenAI's JSON, `app` is the HTTP layer, `connection` what a client
may do below it, `metrics` what Prometheus reads, `server` the process, `log` its lines.
"""
