"""Gated delta rule decode of two to four tokens, GDN with bf16 states, on tensor cores by warps that
wait for nobody.

The equations are those of `wy_lanes`. A warp has eight rows of V, and of each row a quad of lanes,
one a token. Its mma has the state's rows g as rows 0 to 7 of A, and k and q of the tokens as rows 8
to 15 and as B's columns: one chain of products gives S0 k_t, S0 q_t, k_i.k_t and k_i.q_t, all of
them to token t's lane. No element of k or q is widened, and no sum is taken by shuffles. It wins on
an H200 where drafts of three or four tokens write a slot a token and few blocks run.

The states between tokens are products too, of two tokens' states at a time: D_t S0 is where they
begin, u in three bf16 terms is A, and k, which is exact, is B. `parts` warps have the same rows:
each takes all sums, and states of its share of the keys.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T as ir_types
from cutlass.cutlass_dsl import dsl_user_op

from gdntune.kernels import decode, shuffles
from gdntune.kernels import fragments as fr

F32, BF = Float32, fr.BF
ROWS, QUAD = 8, 4
# elements of a 16-byte load, and keys that a quad loads at once
VEC, RUN = 8, 32


@dsl_user_op
def twice(word: Int32, selector: Int32, *, loc=None, ip=None) -> Int32:
    """A word of one of its halves, twice: the lower by 0x1010, the upper by 0x3232."""
    values = [Int32(x).ir_value(loc=loc, ip=ip) for x in (word, selector)]
    return Int32(
        llvm.inline_asm(
            ir_types.i32(), values, "prmt.b32 $0, $1, $1, $2;", "=r,r,r", has_side_effects=False,
            is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
        )
    )  # fmt: skip


class WYQuads(decode.Decode):
    """The compile-time facts of one object."""

    def __init__(self, facts: dict, knobs: dict):
        self.parts, threads = knobs["parts"], knobs["threads"]
        super().__init__(facts, threads // 32 // self.parts * ROWS, threads, pdl=knobs["pdl"])
        self.T = self.tokens
        self.row = self.intermediate == "slots"
        self.runs = self.K // RUN
        self.each = self.runs // self.parts
        # tokens after which a state is kept, by twos: what one product computes
        kept = list(range(self.T)) if self.intermediate != "none" else []
        if self.update and not kept:
            kept = [self.T - 1]
        self.twos = [kept[i : i + 2] for i in range(0, len(kept), 2)]

    def run_of(self, part, r: int):
        """A run of keys: those of the warp's own part are the first."""
        return (part ^ r // self.each) * self.each + r % self.each

    @cute.jit
    def read_row(self, source, target, part, place, n: cutlass.Constexpr):
        """Issues the loads of a lane's keys of n runs of a [K] vector, its `place`-th 16 bytes of each."""
        for r in cutlass.range_constexpr(n):
            piece = cute.local_tile(source, (VEC,), (self.run_of(part, r) * QUAD + place,))
            cute.autovec_copy(piece, cute.local_tile(target, (VEC,), (r,)))

    def row_at(self, address, dtype):
        """A [K] vector at an address."""
        pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)
        return cute.make_tensor(pointer, cute.make_layout((self.K,)))

    def of_lane(self, upper, x, y):
        """x of lanes where `upper`, else y; as a choice of two parameters the compiler would load from a chosen address."""
        return y ^ ((x ^ y) & -Int64(upper))

    @cute.jit
    def sums(self, rs, rx):
        """S0 k_t, S0 q_t of row g, and with k (g even) or q of token g / 2 the products of k_t and of q_t, of the lane's token t."""
        acc = fr.registers(8, F32, 0.0)
        s, x = cute.recast_tensor(rs, Int32), cute.recast_tensor(rx, Int32)
        for m in cutlass.range_constexpr(self.K // 16):
            a = fr.registers(8, BF)
            words = cute.recast_tensor(a, Int32)
            for i in cutlass.range_constexpr(2):
                words[2 * i] = s[2 * m + i]
                words[2 * i + 1] = x[2 * m + i]
            b = fr.operand_b(rx, 4 * m)
            # two chains: mma's latency is what is waited for
            fr.mma(fr.accumulator(acc, m % 2 * 4), fr.operand_a(a), b)
        return tuple(acc[i] + acc[4 + i] for i in range(4))

    @cute.jit
    def spans(self, decay, c):
        """Of the lane's token t: D_t, F_(t,i) of each i < t and 1 of others, what u_t is multiplied by in the state after each token,
        and D_s of each token s.
        """
        T = const_expr(self.T)
        rd = fr.registers(T)
        for t in cutlass.range_constexpr(T):
            rd[t] = shuffles.at_lane(decay, Int32(t))
        span = fr.registers(T, F32, 1.0)
        for i in cutlass.range_constexpr(T - 1):
            s = const_expr(T - 2 - i)
            span[s] = span[s + 1] * cutlass.select_(c > s, rd[s + 1], F32(1.0))
        later, upto = fr.registers(T), fr.registers(T)
        for s in cutlass.range_constexpr(T):
            if const_expr(s == 0):
                later[s] = cutlass.select_(c == 0, F32(1.0), F32(0.0))
                upto[s] = rd[s]
            else:
                later[s] = cutlass.select_(c == s, F32(1.0), later[s - 1] * rd[s])
                upto[s] = upto[s - 1] * rd[s]
        return span[0] * rd[0], span, later, upto

    @cute.jit
    def two_states(
        self, w, rs, rk, begin_first, begin_second, run: cutlass.Constexpr, selector, out
    ):
        """A run's keys of row g after two tokens, each `begin` S0 and u in terms times k."""
        s, k, packed = (cute.recast_tensor(x, Int32) for x in (rs, rk, out))
        for j in cutlass.range_constexpr(VEC // 2):
            acc = fr.registers(4, F32)
            pair = cute.make_tensor(rs.iterator + run * VEC + 2 * j, cute.make_layout((2,)))
            x = fr.wide(pair, 2)
            for e in cutlass.range_constexpr(2):
                acc[e] = x[e] * begin_first
                acc[2 + e] = x[e] * begin_second
            b = fr.registers(4, BF)
            words = cute.recast_tensor(b, Int32)
            words[0] = twice(k[run * QUAD + j], selector)
            words[1] = words[0]
            fr.mma(fr.accumulator(acc), fr.operand_a(w), fr.operand_b(b))
            for e in cutlass.range_constexpr(2):
                word = fr.registers(2, BF)
                word.store(fr.pair(acc, 2 * e).load().to(BF))
                packed[e * QUAD + j] = cute.recast_tensor(word, Int32)[0]

    @cute.jit
    def terms(self, x, first, second):
        """A of the states after two tokens: x times each factor, in three bf16 terms and a zero."""
        w = fr.registers(8, BF)
        words = cute.recast_tensor(w, Int32)
        rest = fr.registers(2)
        rest[0] = x * first
        rest[1] = x * second
        # of both states by one instruction; each word of A has two terms of one of them
        one, two, three = (cute.recast_tensor(fr.split(rest), Int32)[0] for _ in range(3))
        words[0] = (one & 0xFFFF) | (two << 16)
        words[1] = ((one >> 16) & 0xFFFF) | (two & -65536)
        words[2] = three & 0xFFFF
        words[3] = (three >> 16) & 0xFFFF
        return w

    @cute.jit
    def work(self, call, options, sizes):
        tid, _, _ = cute.arch.thread_idx()
        vt, hv, n = self.place()
        T = const_expr(self.T)
        wl = tid % 32
        g, c = wl // QUAD, wl % QUAD
        warp = cute.arch.make_warp_uniform(tid // 32)
        part = Int32(0) if const_expr(self.parts == 1) else warp & (self.parts - 1)
        row0 = vt * self.tile_v + (warp >> (self.parts.bit_length() - 1)) * ROWS + g
        hq, _ = divmod(hv, sizes.heads)
        self.await_producer("first")
        # asked for before what a slot hangs on is waited for
        span_ends = fr.registers(2, Int32)
        if const_expr(self.ragged):
            span_ends[0] = call.cu_seqlens[n]
            span_ends[1] = call.cu_seqlens[n + 1]
        asked = self.ask_slots(n, wl, call, sizes.columns)
        # the state's address waits for this: nothing may be computed before it that does not serve it
        cute.arch.sync_warp()
        if const_expr(self.ragged):
            ni, t0, length = self.span_of(0, span_ends, sizes.tokens)
        else:
            ni, t0, length = self.span_of(n, None, sizes.tokens)
        A, bias, _ = self.head_gate(
            call.A_log, call.dt_bias, sizes.A_shared, sizes.dt_shared, hq, hv
        )
        # k of lanes whose g is even, q of the others: one address, known but for where the request's tokens are
        odd = g % 2 == 1
        base, stride, request = (
            self.of_lane(odd, x, y)
            for x, y in (
                (call.q.iterator.toint(), call.k.iterator.toint()),
                (Int64(call.q.stride[1]), Int64(call.k.stride[1])),
                (Int64(call.q.stride[0]), Int64(call.k.stride[0])),
            )
        )
        # Loads do not move across this; without it the compiler sinks them below the branch.
        cute.arch.sync_warp()
        # Both are positive: ptxas moves what is not behind a branch before loads, and waits there for what an earlier load gives. But a
        # ragged call may have no token at all. Where its states are copied, or a kernel is waited for, the slots are asked about first:
        # behind `length > 0` there are tokens.
        first, second = sizes.tokens, sizes.slots
        if const_expr(self.ragged and (self.update or self.pdl == "state")):
            first, second = second, first
        if first > 0:
            slot = self.start_of(asked, n, call.slot_index, sizes.columns)
            live, writes = self.named(slot, asked.write_slot, sizes.slots, options.null_index)
            row, keeps = self.kept_row(n, live, call.slot_index, sizes.rows, options.null_index)
            # widened again where it is used: until then it takes one register
            at = Int32(row)
            starts = live
            if const_expr(self.ragged):
                live = live and length > 0
            if live:
                rs = fr.registers(self.K // QUAD, self.state_dtype)
                self.read_row(call.state[Int64(slot), hv, row0, None], rs, part, c, self.runs)
                # loads do not move across this either: the state is what all wait for
                cute.arch.sync_warp()
                self.await_producer("state")
                # always: it is 0 or 1
                if options.use_qk_l2norm != -2147483648:
                    # Lanes of tokens that are none read the last one's: a branch here would wait for what it reads.
                    mine = cutlass.min(t0 + cutlass.min(c, length - 1), sizes.tokens - 1)
                    yours = cutlass.min(t0 + cutlass.min(g >> 1, length - 1), sizes.tokens - 1)
                    width = const_expr(call.k.element_type.width // 8)
                    place = (
                        base
                        + (request * Int64(ni) + stride * Int64(yours) + Int64(hq) * self.K) * width
                    )
                    rx = fr.registers(self.K // QUAD, call.k.element_type)
                    self.read_row(self.row_at(place, call.k.element_type), rx, part, c, self.runs)
                    ra = call.a[ni, mine, hv]
                    rb = call.b[ni, mine, hv]
                    rv = call.v[ni, mine, hv, row0]
                    rk = fr.registers(self.each * VEC, call.k.element_type)
                    if const_expr(len(self.twos) > 0):
                        self.read_row(call.k[ni, mine, hq, None], rk, part, g >> 1, self.each)
                    if const_expr(self.parts > 1):
                        # before any warp of a row writes, all have asked for it: a state may go back to where it came from
                        cute.arch.sync_threads()
                    else:
                        cute.arch.sync_warp()
                    # always, as above
                    if second > 0:
                        decay = self.decay_of(ra.to(F32), A, bias, options)
                        beta = self.beta_of(rb, options.beta_scale)
                        token = c < length
                        decay = cutlass.select_(token, decay, F32(1.0))
                        beta = cutlass.select_(token, beta, F32(0.0))
                        value = cutlass.select_(token, rv.to(F32), F32(0.0))
                        D, span, later, upto = self.spans(decay, c)
                        sk, sq, xk, xq = self.sums(rs, rx)
                        own = 2 * QUAD * c + c
                        iq, ik = self.norms(
                            shuffles.at_lane(xq, own + QUAD),
                            shuffles.at_lane(xk, own),
                            options.scale,
                            options.use_qk_l2norm,
                        )
                        # x: u_t over the norm of k_t, which its key is then taken with as it came
                        start = value * (beta * ik)
                        factor = beta * ik * ik
                        total = sk * D
                        y = sq * D
                        for i in cutlass.range_constexpr(T):
                            kk = shuffles.at_lane(xk, 2 * QUAD * i + c) * span[i]
                            kq = shuffles.at_lane(xq, 2 * QUAD * i + c) * span[i]
                            x = shuffles.at_lane(start - total * factor, wl - c + i)
                            if const_expr(i < T - 1):
                                total += x * cutlass.select_(c > i, kk, F32(0.0))
                            y += x * cutlass.select_(c >= i, kq, F32(0.0))
                        x = start - total * factor
                        if token and part == 0:
                            call.output[ni, mine, hv, row0] = (y * iq).to(call.output.element_type)
                        # of B's column g, one of two keys that are a word
                        selector = cutlass.select_(odd, Int32(0x3232), Int32(0x1010))
                        for p in cutlass.range_constexpr(len(self.twos)):
                            kept = const_expr(self.twos[p])
                            s0, s1 = const_expr(kept[0]), const_expr(kept[-1])
                            w = self.terms(x, later[s0], later[s1])
                            places = [
                                self.kept_at(t, asked, at, keeps, length, sizes, options.null_index)
                                for t in kept
                            ]
                            for r in cutlass.range_constexpr(self.each):
                                out = fr.registers(2 * VEC, BF)
                                self.two_states(w, rs, rk, upto[s0], upto[s1], r, selector, out)
                                run = self.run_of(part, r) * QUAD + c
                                for e in cutlass.range_constexpr(len(kept)):
                                    piece = cute.make_tensor(
                                        out.iterator + e * VEC, cute.make_layout((VEC,))
                                    )
                                    to, ok = places[e]
                                    if const_expr(self.intermediate != "none"):
                                        if ok:
                                            head = self.kept_head(
                                                call.state,
                                                call.intermediate,
                                                Int64(to),
                                                kept[e],
                                                hv,
                                            )
                                            cute.autovec_copy(
                                                piece,
                                                cute.local_tile(head[row0, None], (VEC,), (run,)),
                                            )
                                    if const_expr(self.update and kept[e] == T - 1):
                                        if writes:
                                            line = call.state[
                                                Int64(asked.write_slot), hv, row0, None
                                            ]
                                            cute.autovec_copy(
                                                piece, cute.local_tile(line, (VEC,), (run,))
                                            )
            else:
                self.await_producer("state")
                self.zero_rows(call.output, ni, t0, length, hv, vt * self.tile_v, tid)
                if const_expr(self.ragged and self.update):
                    # a request without tokens: its start state is its final one
                    if starts and writes:
                        raw = fr.registers(self.each * VEC, self.state_dtype)
                        source = call.state[Int64(slot), hv, row0, None]
                        self.read_row(source, raw, part, c, self.each)
                        line = call.state[Int64(asked.write_slot), hv, row0, None]
                        for r in cutlass.range_constexpr(self.each):
                            piece = cute.local_tile(raw, (VEC,), (r,))
                            run = self.run_of(part, r) * QUAD + c
                            cute.autovec_copy(piece, cute.local_tile(line, (VEC,), (run,)))


def compile(facts: dict, knobs: dict, options: str, prefix: str):
    """The compiled function of one setting, for the architecture that CUTE_DSL_ARCH names; profilers show `prefix`."""
    return decode.compiled(WYQuads(facts, knobs), facts, options, prefix)
