"""The routes of the API, by topic. Each file has handlers and a function `add_to` that adds them to an application.

requests     reads bodies, and stores answers by their idempotency key
sessions     client/config, sessions, telemetry, server capabilities
training     models, forward_backward, optim_step, loads, and saves: everything that returns a future
futures      retrieve_future
sampling     sampling sessions and sampling requests
catalog      lists, copies, publishes, expires, and deletes training runs and checkpoints
downloads    adapters as files and archives
"""
