"""The models of ``hotbed.nn`` on planted logs that they are made for, on the real log, and how fast they train.

    python -m benchmarks.models quality --json benchmarks/results/models.json [--real_log LOG]
    python -m benchmarks.models rates --json benchmarks/results/model_rates.json
    python -m benchmarks.models table --json benchmarks/results/models.json --page docs/models.md

*Quality.* A model and `DLRM` are trained on the same log, by the same loop, with the same number of search trials:
trial i of either has the same learning rates, dim and widths (`benchmarks.models.training`). The trial that is best on
valid is trained with further seeds and tested. DLRM gets the same columns, histories as the mean of their vectors, and
sees the vectors beside their products (``embeddings_to_top``). The click probabilities of the logs are known, so the
attainable AUC is, too (`benchmarks.models.logs`):

- *interests*: a user likes several kinds of items at once, and clicks what is like some part of a long history;
- *drift*: what a user likes changes while the history goes on, and the newest part says most;
- *order*: what was looked at last says what comes next, as blades follow razors;
- *crosses*: three columns together say what none of them, nor two, do;
- *slopes*: users and items differ in how much price, distance and other numbers matter;
- *tasks*: clicks, and rare purchases of what was clicked, which share tastes and have some of their own;
- *retrieval*: which of 100,000 items comes next, by the history; recall@100 over all of them (`.retrieval`).

*Real log.* Recipes as ``hotbed init --model NAME`` drafts them, unedited, for the models whose columns the log has.

*Rates.* Samples/s of training steps of DCNv2, DIN and HSTU beside the same formula in plain PyTorch, in turns
(`.rates`).
"""
