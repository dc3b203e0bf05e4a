"""The wire format of the Tinker API: requests become validated plain values, and results become responses.

training_data  TrainingBatch: the input of forward_backward, from protobuf or from JSON
tensors        the tensors in requests, dense or sparse
samples        SampleOutput: sampled sequences and prompt scores, also in the SDK's format
results        the results of passes in the SDK's format: protobuf and JSON
fields         reads single fields of a JSON body, with errors that name the field
"""
