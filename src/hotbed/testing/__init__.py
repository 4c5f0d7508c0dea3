"""Publish the tests of hotbed's contracts, for implementations of your own; needs pytest.

=========================  ==============================================================================
`hotbed.testing.executor_contract`  ``ExecutorContract``: what an executor must do that runs the tasks of
`hotbed.prepare`
`hotbed.testing.model_contract`     ``ModelContract``: what every model that a recipe names must do
`hotbed.testing.rule_contract`      ``RuleContract``: what every `hotbed.optim.SparseOptimizer` must do
`hotbed.testing.source_contract`    ``SourceContract``: what every `hotbed.data.Source` must do
`hotbed.testing.store_contract`     ``StoreContract``: what every `hotbed.store.RowStore` must do
=========================  ==============================================================================

hotbed's own models, optimizers, sources and stores run the same tests. How they are used is shown in docs/extending.md.
"""

try:
    import pytest
except ModuleNotFoundError as error:
    raise ImportError(f"hotbed.testing needs pytest ({error}); pip install 'hotbed[testing]'") from error

CONTRACTS = ("executor", "model", "rule", "source", "store")
pytest.register_assert_rewrite(*(f"hotbed.testing.{name}_contract" for name in CONTRACTS))
