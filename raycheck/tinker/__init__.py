"""A server for the training API of the `tinker` SDK, on Ray, with its checkpoints in the bucket. See docs/tinker.md.

It is a face of raycheck, as the command line is, and uses raycheck's public interface only.

server            serves HTTP
access            who may call, and how every failure is answered
routes/           the routes of the API, by topic
service           sessions, training runs, and the life of every request from its arrival to its result
model_queue       runs the requests of one model in order, and rebuilds the model after a death of the engine
sampling          sampling sessions and their requests
operations        what each kind of request does
journal           the server's own state, in one SQLite file
models            what the server knows of a training run
checkpoint_store  the checkpoints in the bucket: found, listed, deleted, given another expiry
checkpoint_paths  how the API's names lie in the bucket
wire/             the bytes of the API: requests become checked plain values, and results become answers
engine/           the models, in a Ray actor
"""
