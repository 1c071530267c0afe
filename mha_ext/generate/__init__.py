"""Text from a small language model whose attention keeps its keys and values in a cache.

``python -m mha_ext.generate`` (``--quick`` for half a minute) trains the demo's model with grouped queries, rotary
positions and a sliding window, lets it write, and measures what `mha_ext.KVCache` gains in time and takes in memory.

The cache in a loop of one's own: one `KVCache` for each layer; the prompt goes in at once, then every new token alone.
Queries see, causally, all that the cache holds; positions go on from its length. No mask is needed.

>>> import torch, mha_ext
>>> attention = mha_ext.MultiheadAttention(32, 8, num_kv_heads=2, rope=True, window=(15, 0), batch_first=True).eval()
>>> embedding, head = torch.nn.Embedding(50, 32), torch.nn.Linear(32, 50)
>>> cache = mha_ext.KVCache(1, attention.num_kv_heads, None, attention.head_dim, window=16)
>>> tokens = new = torch.tensor([[7, 2, 9]])
>>> with torch.no_grad():  # a cache passes no gradients
...     for _ in range(40):
...         x = embedding(new)
...         x = x + attention(x, x, x, kv_cache=cache, need_weights=False)[0]
...         new = head(x[:, -1:]).argmax(-1)
...         tokens = torch.cat((tokens, new), 1)
>>> tokens.shape, cache.length  # the last token has not been through attention
(torch.Size([1, 43]), 42)

The first argument of `KVCache` is the batch size, the third the most positions it shall hold. None needs ``window``:
then it rolls, and keeps the last 16 to 32 positions here, however long the text gets. A ``window=(left, right)`` of the
layer counts the keys before a query, that of the cache the query as well: ``left + 1``. A new text begins with
``cache.reset()``; prompts of different length are padded behind, with a ``key_padding_mask`` in the first call.
"""
