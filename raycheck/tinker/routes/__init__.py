"""The routes of the API, by topic. Each file has handlers, and `add_to`, which adds them to an application.

requests     reads bodies, and remembers answers by their idempotency key
sessions     client/config, sessions, telemetry, what the server has
training     models, forward_backward, optim_step, loads and saves: all that becomes a future
futures      retrieve_future
sampling     sampling sessions, and requests to sample
catalog      training runs and checkpoints: listed, copied, published, deleted, their expiry
downloads    adapters as files and archives
"""
