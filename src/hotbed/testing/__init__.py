"""Publish the tests of hotbed's contracts, for implementations of your own; needs pytest.

=========================  ==============================================================================
`hotbed.testing.store`     ``StoreContract``: what every `hotbed.store.RowStore` must do
=========================  ==============================================================================

hotbed's own stores run the same tests.
"""

import pytest

pytest.register_assert_rewrite("hotbed.testing.store")
