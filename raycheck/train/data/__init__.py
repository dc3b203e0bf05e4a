"""Makes up the stream of global batches (batches.py) from four parts, behind one interface:

epoch_order      which sample comes where: a pure function of seed and epoch
stream_position  how far the stream is, and which loader may go on with it
batch_loader     the iterator that a training loop gets
data_stream      what the Checkpointer asks of any stream of training data
sample_seeding   random augmentation that depends on the sample's position alone
"""
