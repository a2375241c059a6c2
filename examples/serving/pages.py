"""Who has which page of the cache. Pages are found again by the next request that begins with the same tokens."""

from collections import OrderedDict


class Pages:
    """A page is free, or has owners, or has none but is remembered: it keeps its keys until somebody needs the room.

    A remembered page is known by the page before it and its own tokens, so by all tokens from the beginning. What a request
    will need to its end is promised when it is admitted: no request that runs ever waits for a page.
    """

    def __init__(self, count, page_size):
        self.count, self.page_size = count, page_size
        self.free = list(range(count))
        self.owners = [0] * count
        self.known = {}  # (number of the page before, tokens) -> page
        self.key_of = {}  # page -> its entry in known
        self.number = {None: 0}  # page -> a number that no other content ever has
        self.numbers = 0
        self.idle = OrderedDict()  # remembered pages without owner, the next to be given away first
        self.promised = 0

    def begin(self, tokens, most):
        """Pages that hold the beginning of tokens, for a request of at most `most` tokens; None if there is no room for it.

        At least one token is left: its logits are wanted.
        """
        shared, before = [], None
        for start in range(0, len(tokens) - self.page_size, self.page_size):
            page = self.known.get((self.number[before], tuple(tokens[start : start + self.page_size])))
            if page is None:
                break
            shared.append(page)
            before = page
        new = self.needed(most) - len(shared)
        if new > len(self.free) + sum(page not in shared for page in self.idle) - self.promised:
            return None
        for page in shared:
            self.owners[page] += 1
            self.idle.pop(page, None)
        self.promised += new
        return shared

    def needed(self, tokens):
        return -(-tokens // self.page_size)

    def take(self):
        """A page of what was promised, with nothing of use in it."""
        self.promised -= 1
        if self.free:
            page = self.free.pop()
        else:
            page, _ = self.idle.popitem(last=False)
            self._forget(page)
        self.owners[page] = 1
        return page

    def remember(self, before, page, tokens):
        """A page is full: it holds `tokens` behind those of the page `before` (None = it is the first)."""
        if page in self.key_of or (before is not None and before not in self.number):
            return
        key = (self.number[before], tuple(tokens))
        if key not in self.known:  # two requests may have computed the same
            self.numbers += 1
            self.known[key], self.key_of[page], self.number[page] = page, key, self.numbers

    def end(self, pages, most):
        """A request of at most `most` tokens gives its pages back, the last first: beginnings are remembered longest."""
        self.promised -= self.needed(most) - len(pages)
        for page in reversed(pages):
            self.owners[page] -= 1
            if self.owners[page] == 0 and page in self.key_of:
                self.idle[page] = None
            elif self.owners[page] == 0:
                self.free.append(page)

    def used(self):
        return self.count - len(self.free) - len(self.idle)

    def _forget(self, page):
        del self.known[self.key_of.pop(page)], self.number[page]
