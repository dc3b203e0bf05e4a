"""Makes up the streams of samples whose position a checkpoint keeps (batches.py, ray_data.py) from these parts:

epoch_order       which sample comes where: a pure function of seed and epoch
stream_position   how far the stream is, and which loader may go on with it
batch_loader      the iterator that a training loop gets
data_stream       what the Checkpointer asks of any stream of training data
sample_seeding    random augmentation that depends on the sample's position alone
batch_source      what Batches need of the data behind them
numbered_samples  samples that can be asked for by number, in an order of seed and epoch
streamed_samples  samples that come in an order of their own
shared_streams    streams: which rank reads which shards of them, and from where
source_proof      reads some samples on trial: are they the checkpoint's, does a state lead back
proof_agreement   compares what the ranks have read
isolated_call     runs such a trial in a forked child, which changes nothing here
loader_checks     refuses loaders of torchdata that would not go on where they were
step_history      which batches each step took
step_samples      the samples of a step, from a checkpoint
row_set           the rows of Ray Data's that were consumed
"""
