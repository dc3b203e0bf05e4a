"""Makes up the stream of global batches (batches.py) from four parts:

epoch_order      which sample comes where: a pure function of seed and epoch
stream_position  how far the stream is, and which loader may go on with it
batch_loader     the iterator that a training loop gets
sample_seeding   random augmentation that depends on the sample's position alone
"""
