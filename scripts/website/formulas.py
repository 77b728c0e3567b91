"""Formulas of docstrings, which are written as plain text, and LaTeX formulas of pages, as MathML.

A docstring contains ``s_ij = q_i . k_j / sqrt(D)``. Juxtaposition is a product and binds tighter than ``/``;
``_ij`` and ``_(t-1)`` are subscripts, ``^T`` and ``^(n-1)`` superscripts; ``.`` is a dot product.
``|x|`` is a norm. Browsers render MathML without scripts and without fonts from elsewhere.
"""

import re
from collections.abc import Iterator
from html import unescape

from latex2mathml.converter import convert

GREEK = {"alpha", "beta", "gamma", "epsilon", "eta", "zeta", "theta", "lambda", "mu", "nu", "pi", "sigma"}
GREEK |= {"tau", "phi", "chi", "psi", "omega"}
NAMED = {"sin", "cos", "tanh", "exp", "log", "ln", "min", "max"}
"""Functions that LaTeX knows."""
SUMS = {"sum", "prod"}
PREFIXES = {"argmax", "log", "softmax", "mean", "round"}
"""Operators whose argument needs no parentheses; they stay in front of a fraction."""
OPERATORS = {
    "<=": r"\le ",
    ">=": r"\ge ",
    "<-": r"\leftarrow ",
    "+=": r"\mathrel{+}= ",
    "-=": r"\mathrel{-}= ",
    "*=": r"\mathrel{*}= ",
    "...": r"\ldots ",
    "..": r"\ldots ",
    "(x)": r"\otimes ",
    "*": r"\cdot ",
    ".": r"\cdot ",
}
TOKEN = re.compile(
    r"(?P<script>[_^](?:\{[^}]*\}|-?\d+(?:/\d+)?|[A-Za-z0-9]+'*|(?=\()))"
    r"|(?P<number>\d+(?:\.\d+)?(?:e-?\d+)?)|(?P<word>[A-Za-z]+\d?'*)|(?P<tensor>(?<= )\(x\)(?= ))"
    r"|(?P<operator><=|>=|<-|\+=|-=|\*=|\.\.\.|\.\.|[-+*/=<>.,:;|()\[\]{}])|(?P<space>\s+)"
)
CODE = re.compile(
    r"[a-z]{2,}_[a-z]{3,}|[a-z]\w+=[\w'\"]|//|=[\"']|[A-Za-z]{2,}\.[A-Za-z]|^\W+$|^[A-Z]\w*[a-z]\w*\("
)
"""Signs of code: a name of several words, a keyword argument, a module, or a call of a class."""
SYMBOL = re.compile(r"(?:[A-Za-z]|theta|pi|zeta|mem)_\w")
OPEN, CLOSE = {"(": ")", "[": "]", "{": "}"}, {")", "]", "}"}
ENDS = {"+", "-", "=", "<", ">", "<=", ">=", "<-", "+=", "-=", "*=", ",", ";", ":", "*", "...", ".."}
"""Tokens that end a product, and with it a fraction."""


class FormulaError(ValueError):
    """Text that is not a formula in the notation of the docstrings."""


def is_formula(code: str) -> bool:
    """Return whether the text of double backticks is a formula; otherwise it is code."""
    if re.fullmatch(r"[\w-]+", code):
        return bool(SYMBOL.fullmatch(code))
    if CODE.search(code) or not any(_is_symbol(word) for word in re.findall(r"[A-Za-z]+", code)):
        return False
    try:
        to_latex(code)
    except FormulaError:
        return False
    return True


def to_latex(text: str) -> str:
    """Return LaTeX of a formula of a docstring.

    Raises:
        FormulaError: if the text has unknown characters or brackets that do not match.
    """
    parser = _Parser(list(_tokens(text)))
    latex = parser.sequence(until=None)
    if parser.tokens:
        raise FormulaError(f"{text!r} has an unexpected {parser.tokens[0][1]!r}")
    return latex.strip()


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None:
            raise FormulaError(f"{text!r} has an unknown character {text[position]!r}")
        yield str(match.lastgroup), match[0]
        position = match.end()


class _Parser:
    """Parser of a list of tokens, which it consumes."""

    def __init__(self, tokens: list[tuple[str, str]]):
        self.tokens = tokens
        self.scripts_open = 0

    def peek(self) -> str:
        """Return the next token that is not a space, or an empty text."""
        return next((text for kind, text in self.tokens if kind != "space"), "")

    def skip_spaces(self) -> bool:
        found = False
        while self.tokens and self.tokens[0][0] == "space":
            self.tokens.pop(0)
            found = True
        return found

    def sequence(self, until: str | None) -> str:
        """Return the LaTeX of products and the operators between them, up to a closing bracket."""
        parts = []
        while self.tokens and self.peek() not in CLOSE | {until}:
            before = self.skip_spaces()
            token = self.tokens[0][1] if self.tokens else ""
            if token in ENDS:
                parts.append(self.operator())
            elif (
                token == "|" and before and until != "|" and self.tokens[1:2] and self.tokens[1][0] == "space"
            ):
                self.tokens.pop(0)
                parts.append(r"\mid ")
            elif token:
                parts.append(self.fraction(until))
        self.skip_spaces()
        return "".join(parts)

    def operator(self) -> str:
        text = self.tokens.pop(0)[1]
        return OPERATORS.get(text, r",\;" if text == "," else r";\;" if text == ";" else text)

    def fraction(self, until: str | None) -> str:
        prefix = ""
        while re.match(r"[a-z]+", self.peek()) and self.peek() in PREFIXES and not self.is_call():
            prefix += self.atom() + r"\,"
        latex = self.product(until)
        while self.peek() == "/":
            self.skip_spaces()
            self.tokens.pop(0)
            latex = self.quotient(latex, self.product(until))
        return prefix + latex

    def quotient(self, above: str, below: str) -> str:
        """Return a fraction; in scripts, which are small, with a slash."""
        return f"{above}/{below}" if self.scripts_open else rf"\frac{{{_bare(above)}}}{{{_bare(below)}}}"

    def is_call(self) -> bool:
        """Return whether the next word is followed by an opening bracket, after its subscripts."""
        self.skip_spaces()
        kinds = [token for token in self.tokens[1:] if token[0] != "script"]
        return bool(kinds) and kinds[0][1] == "("

    def product(self, until: str | None) -> str:
        factors: list[str] = []
        while self.tokens:
            token = self.peek()
            if not token or token in ENDS | CLOSE | {"/", until} or (token == "|" and self.is_separator()):
                break
            space = self.skip_spaces()
            if factors and space:
                factors.append(r"\,")
            factors.append(self.atom())
        if not factors:
            raise FormulaError("a product has no factors")
        return "".join(factors)

    def is_separator(self) -> bool:
        """Return whether the next ``|`` has spaces on both sides, as in ``p(a | c)``."""
        if self.tokens[0][0] != "space" or len(self.tokens) < 3:
            return False
        return self.tokens[2][0] == "space"

    def atom(self) -> str:
        kind, text = self.tokens.pop(0)
        if text in OPEN:
            base = self.bracket(text)
        elif text == "|":
            base = rf"\left\vert {self.sequence(until='|')}\right\vert "
            self.close("|")
        elif kind == "word":
            base = (
                _word(text)
                if text not in SUMS or (self.tokens[:1] and self.tokens[0][0] == "script")
                else rf"\mathrm{{{text}}}"
            )
        elif kind == "number":
            base = re.sub(r"^1e(-?\d+)$", r"10^{\1}", text)
        elif kind == "script":
            raise FormulaError(f"{text!r} has no base")
        else:
            base = OPERATORS.get(text, text)
        return base + self.scripts(base)

    def bracket(self, opening: str) -> str:
        inner = self.sequence(until=None)
        closing = self.close(OPEN[opening], {")"} if opening == "[" else set())
        left, right = (rf"\{b}" if b in "{}" else b for b in (opening, closing))
        return rf"\left{left}{inner}\right{right}"

    def close(self, expected: str, alternatives: set[str] = frozenset()) -> str:  # type: ignore[assignment]
        self.skip_spaces()
        if not self.tokens or self.tokens[0][1] not in {expected} | alternatives:
            raise FormulaError(f"{expected!r} is missing")
        return self.tokens.pop(0)[1]

    def scripts(self, base: str) -> str:
        """Return the sub- and superscripts after a base."""
        latex = ""
        while self.tokens and self.tokens[0][0] == "script":
            mark, text = self.tokens[0][1][0], self.tokens.pop(0)[1][1:]
            inner = self.script(text)
            if mark == "^" and (base == "e" or base.endswith("vert ")) and self.tokens[:1]:
                inner += self.scripts("")  # e^b_h is e to the power of b_h
            latex += f"{mark}{{{inner}}}"
        return latex

    def script(self, text: str) -> str:
        if not text:  # in parentheses, which the next token opens
            self.tokens.pop(0)
            self.scripts_open += 1
            inner = self.sequence(until=None)
            self.scripts_open -= 1
            self.close(")")
            return inner
        if text.startswith("{"):
            return to_latex(text[1:-1])
        if len(text) > 2 and text.isalpha():
            return _word(text)
        word = re.fullmatch(r"([A-Za-z]+)('*)", text)
        return rf"{text}" if word is None or len(word[1]) <= 2 else _word(text)


def _word(text: str) -> str:
    """Return LaTeX of a variable, with its primes and its number, or of the name of a function."""
    name, primes = text.rstrip("'"), "'" * (len(text) - len(text.rstrip("'")))
    digits = name[-1] if name[-1].isdigit() else ""
    name = name.rstrip("0123456789")
    if name == "sqrt":
        latex = r"\sqrt"
    elif name in GREEK or name in NAMED:
        latex = rf"\{name} "
    elif name in SUMS:
        latex = rf"\{name}\nolimits "
    elif len(name) == 1:
        latex = name
    else:
        latex = rf"\mathrm{{{name}}}"
    return latex + (f"^{{{digits}}}" if digits else "") + primes


def _bare(latex: str) -> str:
    """Return LaTeX without the parentheses that a fraction makes superfluous."""
    if not (latex.startswith(r"\left(") and latex.endswith(r"\right)")):
        return latex
    depth = 0
    for match in re.finditer(r"\\left\(|\\right\)", latex):
        depth += 1 if match[0] == r"\left(" else -1
        if depth == 0 and match.end() < len(latex):
            return latex
    return latex[len(r"\left(") : -len(r"\right)")]


def _with_roots(latex: str) -> str:
    """Return LaTeX whose roots have their argument in braces instead of parentheses."""
    while (start := latex.find(r"\sqrt\left(")) >= 0:
        depth, begin = 0, start + len(r"\sqrt")
        for match in re.finditer(r"\\left\(|\\right\)", latex[begin:]):
            depth += 1 if match[0] == r"\left(" else -1
            if depth == 0:
                end = begin + match.end()
                inner = latex[begin + len(r"\left(") : end - len(r"\right)")]
                latex = latex[:start] + rf"\sqrt{{{inner}}}" + latex[end:]
                break
    return latex


def _is_symbol(word: str) -> bool:
    return len(word) == 1 or word in GREEK


def formula_latex(text: str) -> str:
    """Return LaTeX of a formula of a docstring, with roots in braces."""
    return _with_roots(to_latex(text))


def latex_to_mathml(latex: str, display: bool = False) -> str:
    """Return MathML of a LaTeX formula, in a line of text or as a block."""
    mathml = convert(latex, display="block" if display else "inline")
    return ASSIGNMENT.sub(r"<mo>\1=</mo>", mathml)


ASSIGNMENT = re.compile(r"<mo><mrow><mo>([^<]+)</mo></mrow></mo><mo>&#x0003D;</mo>")
"""MathML of an operator such as ``+=``, which LaTeX composes of two."""
MATH = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<mark>[(\[])(?P<latex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)


def with_mathml(html: str) -> str:
    """Return HTML in which the formulas that arithmatex marks are MathML."""
    return MATH.sub(
        lambda match: latex_to_mathml(unescape(match["latex"]).strip(), display=match["mark"] == "["), html
    )
