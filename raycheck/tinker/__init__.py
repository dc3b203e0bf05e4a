"""A server for the training API of the `tinker` SDK, on Ray, with its checkpoints in the bucket. See docs/tinker.md.

Like the command line, it is a front end of raycheck and uses raycheck's public interface only.

server            serves HTTP
access            who may call, and how every failure is answered
routes/           the routes of the API, by topic
service          sessions, training runs, and every request from its arrival to its result
model_queue      runs the requests of one model in order, and rebuilds the model when the engine has died
sampling          sampling sessions and their requests
operations       one function per kind of request
journal           the server's own state, in one SQLite file
models           the server's data about a training run
checkpoint_store  finds, lists, and deletes checkpoints in the bucket, and changes their expiry
checkpoint_paths  maps the API's names to the bucket
wire/            the API's wire format: requests become validated plain values, and results become responses
engine/           the models, in a Ray actor
"""
