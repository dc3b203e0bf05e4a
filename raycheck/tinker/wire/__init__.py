"""The bytes of the Tinker API: requests become checked plain values, and results become answers.

training_data  TrainingBatch: what forward_backward gets, from protobuf or from JSON
tensors        the tensors in requests, dense or sparse
samples        SampleOutput: what is sampled, and the scores of a prompt; also as the SDK reads them
results        the results of passes as the SDK reads them: protobuf, and the same as JSON
fields         reads single fields of a JSON body, with errors that name the field
"""
