"""Tests of hotbed's contracts, for implementations of your own; they need pytest.

Write a test class that inherits from a contract and defines how to make your implementation (see docs/extending.md).
hotbed's own models, optimizers, sources and stores run the same tests.

==================================  ============================================================
`hotbed.testing.executor_contract`  ``ExecutorContract`` for executors of `hotbed.prepare`
`hotbed.testing.model_contract`     ``ModelContract`` for models of recipes
`hotbed.testing.rule_contract`      ``RuleContract`` for every `hotbed.optim.SparseOptimizer`
`hotbed.testing.source_contract`    ``SourceContract`` for every `hotbed.data.Source`
`hotbed.testing.store_contract`     ``StoreContract`` for every `hotbed.store.RowStore`
==================================  ============================================================
"""

try:
    import pytest
except ModuleNotFoundError as error:
    raise ImportError(f"hotbed.testing needs pytest ({error}); pip install 'hotbed[testing]'") from error

CONTRACTS = ("executor", "model", "rule", "source", "store")
pytest.register_assert_rewrite(*(f"hotbed.testing.{name}_contract" for name in CONTRACTS))
