"""An executor that runs each call in the calling thread passes the contract of executors."""

from concurrent.futures import Executor, Future

from hotbed.testing.executor_contract import ExecutorContract


class InlineExecutor(Executor):
    """Run each call at once in the thread that submits it, where a debugger finds it."""

    def __init__(self):
        self._is_down = False

    def submit(self, fn, /, *args, **kwargs):
        if self._is_down:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future

    def shutdown(self, wait=True, *, cancel_futures=False):
        self._is_down = True


class TestInlineExecutor(ExecutorContract):
    own_processes = False

    def make(self) -> InlineExecutor:
        return InlineExecutor()
