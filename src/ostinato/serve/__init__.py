"""`ostinato serve`: a model behind OpenAI's endpoints; needs the `serve` extra.

`scheduler` (pure) decides which request runs next, `engine` holds the one thread that owns the
decoder, `protocol` (pure) reads and writes OpenAI's JSON, `app` is the HTTP layer, `page` its chat
page, `connection` the limits of one TCP connection, `metrics` the Prometheus text, `server` the
process, `log` its lines.
"""
