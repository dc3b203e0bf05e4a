"""The bytes of the Tinker API: requests become checked plain values, and results become answers.

training_data  TrainingBatch: what forward_backward gets, from protobuf or from JSON
results        what the SDK reads: protobuf, and the same as JSON
fields         reads single fields of a JSON body, with errors that name the field
"""
