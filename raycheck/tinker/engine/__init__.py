"""The engine of the Tinker server: it holds the models and is the only part that uses torch.

lora_shape    LoraShape and AdamParams: a client's choices for its model and a step; plain values
orders        the engine's inputs and outputs; plain values
ranks         Ranks: the processes that share the base model and split each batch
base_model    BaseModel: the frozen model that all tenants share, and its fingerprint
lora_model    LoraModel: one tenant's adapter over the shared weights, and its optimizer
losses        the losses by name, each a function of log-probabilities and a datum's inputs
passes        forward and backward passes over a batch, all or nothing
samplers      models to sample from: weights of checkpoints, read on first use
generation    sampling from a model, with log-probabilities
commits       a save that a client asks for becomes a commit of the model's run
tenants       Tenants: all models of one process by id, their runs in the bucket, and every operation on them
actor         Tenants in Ray actors, and how the server calls them
"""
