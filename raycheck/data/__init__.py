"""Provides streams of samples whose position a checkpoint stores (batches.py and Ray's ray_data.py), made of these
parts:

epoch_order       which sample comes where: a pure function of seed and epoch
stream_position   the position of the stream, and which loader may continue from it
batch_loader      the iterator that a training loop gets
data_stream       what the Checkpointer requires of any stream of training data
sample_seeding    random augmentation that depends only on the sample's position
batch_source      what Batches require of a data source
numbered_samples  samples that are fetched by number, in an order that seed and epoch decide
streamed_samples  samples that arrive in the stream's own order
shared_streams    sharing of streams: which rank reads which shards, and from which position
source_proof      trial reads: are these the checkpoint's samples, and does a saved state lead back to its position
proof_agreement   comparison of what the ranks have read
isolated_call     a forked child for such a trial, so that it changes nothing in this process
loader_checks     refusal of torchdata loaders that would not resume where they were
step_history      which batches each step used
step_samples      the samples of a step, from a checkpoint
row_set           the rows of Ray Data that were consumed
"""
