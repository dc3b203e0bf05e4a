"""Makes up the streams of samples whose position a checkpoint keeps (batches.py, ray_data.py) from these parts:

epoch_order      which sample comes where: a pure function of seed and epoch
stream_position  how far the stream is, and which loader may go on with it
batch_loader     the iterator that a training loop gets
data_stream      what the Checkpointer asks of any stream of training data
sample_seeding   random augmentation that depends on the sample's position alone
shared_streams   data without numbered samples: which rank reads which of its shards, and from where
step_history     which batches each step took
step_samples     the samples of a step, from a checkpoint
row_set          the rows of Ray Data's that were consumed
"""
