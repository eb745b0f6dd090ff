"""Batches of entries as columns, in one pass and without the GIL.

Owns the memory that becomes Arrow's: concatenated values, 32-bit offsets, validity bits. Must not
know pyarrow or the events: the caller passes the kinds of a message's fields (`zkevm.schema`).
"""

from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport (
    INT32_MAX, INT64_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t,
)
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from datastreamer._codec cimport BatchColumns, as_type, columns_of
from datastreamer._entry cimport HEAD_SIZE
from datastreamer.selection._protobuf cimport (
    BOOL, BYTES, DEBUG, ENUM, FULL_U64, LENGTH, MAX_FIELDS, U32, U64, VARINT, WEI, read_size,
    read_tag, read_varint, skip_value,
)

from datastreamer.errors import UsageError

cdef enum:
    # After the kinds of the schema: the whole data of the entry.
    DATA = 9
    MAX_COLUMNS = MAX_FIELDS + 1
    MAX_LAYOUTS = 4

cdef enum:
    # What to do with an entry that is no such message.
    STOP = 0
    KEEP = 1
    DROP = 2

# 10**38, the end of what a column of amounts holds, as two words.
cdef uint64_t WEI_END_HIGH = <uint64_t>0x4B3B4CA85A86C47A
cdef uint64_t WEI_END_LOW = <uint64_t>0x098A224000000000

cdef struct Cell:
    # A value: a number, or bytes in the batch's buffer.
    uint64_t number
    const uint8_t* at
    bint there

cdef struct Slot:
    # Where a fixed layout has a value.
    int column
    uint32_t at
    uint32_t width

cdef struct FixedLayout:
    # Data of `size` bytes; with `size_at` >= 0, the u32 there is the number of bytes that follow,
    # which are the value of column `tail`.
    uint32_t size
    int size_at
    int tail
    int slots
    Slot slot[MAX_COLUMNS]

cdef struct Target:
    # A column that is being made. Bytes are copied once their total is known. `valid` is NULL for
    # a column that shares the validity bits of the rows.
    int kind
    char* values
    char* valid
    int32_t* offsets
    const uint8_t** sources


cdef object number_too_large(uint64_t number):
    return UsageError(f"entry number {number} is above {INT64_MAX}, the maximum of a signed column")


cdef object too_many_bytes():
    return UsageError(f"a column holds at most {INT32_MAX:,} bytes: slice the batch")


cdef inline bytes room(Py_ssize_t size):
    return PyBytes_FromStringAndSize(NULL, size)


cdef char* hold(object buffer, Py_buffer* view, uint64_t size) except NULL:
    """The memory of a buffer of at least `size` bytes, which the caller releases."""
    PyObject_GetBuffer(buffer, view, PyBUF_WRITABLE)
    if <uint64_t>view.len < size:
        PyBuffer_Release(view)
        raise ValueError(f"a buffer of {view.len} bytes, but {size} are needed")
    # An empty buffer may have a NULL address.
    return <char*>view.buf if view.buf != NULL else <char*>view


cdef inline uint64_t number_at(const BatchColumns* columns, Py_ssize_t i) noexcept nogil:
    return columns.first_number + <uint64_t>i if columns.numbers == NULL else columns.numbers[i]


cdef inline void set_bit(char* bits, Py_ssize_t i, bint on) noexcept nogil:
    if on:
        bits[i >> 3] |= <char>(1 << (i & 7))


cdef inline void copy(char* to, const uint8_t* source, uint32_t size) noexcept nogil:
    # Constant sizes, those of nearly all hashes and addresses, compile to moves.
    if size == 32:
        memcpy(to, source, 32)
    elif size == 20:
        memcpy(to, source, 20)
    else:
        memcpy(to, source, size)


def entry_columns(batch, allocate, *, bint data=True):
    """``(numbers, types, offsets, values)`` of all entries: int64, int64, int32 and bytes.

    ``allocate(size)`` returns the buffer for the bytes, most of the memory: an allocator that
    reuses pages halves the time. Without `data` the last two are None. Raises `UsageError` if a
    number or the total of the bytes is too large for its column.
    """
    cdef BatchColumns columns
    columns_of(batch, &columns)
    cdef Py_ssize_t i, count = columns.count
    cdef uint64_t total = 0
    cdef bytes numbers = room(count * 8), types = room(count * 8)
    cdef int64_t* number = <int64_t*>PyBytes_AS_STRING(numbers)
    cdef int64_t* kind = <int64_t*>PyBytes_AS_STRING(types)
    cdef int32_t* offset
    cdef char* to
    if count and number_at(&columns, count - 1) > <uint64_t>INT64_MAX:
        raise number_too_large(number_at(&columns, count - 1))
    for i in range(count):
        number[i] = <int64_t>number_at(&columns, i)
        kind[i] = columns.types[i]
        total += columns.lengths[i]
    if not data:
        return numbers, types, None, None
    if total > <uint64_t>INT32_MAX:
        raise too_many_bytes()
    cdef bytes offsets = room((count + 1) * 4)
    cdef Py_buffer view
    values = allocate(total)
    offset = <int32_t*>PyBytes_AS_STRING(offsets)
    to = hold(values, &view, total)
    with nogil:
        offset[0] = 0
        for i in range(count):
            memcpy(to + offset[i], columns.base + columns.offsets[i] + HEAD_SIZE,
                   columns.lengths[i])
            offset[i + 1] = offset[i] + <int32_t>columns.lengths[i]
    PyBuffer_Release(&view)
    return numbers, types, offsets, values


cdef bint is_utf8(const uint8_t* text, Py_ssize_t size) noexcept nogil:
    with gil:
        try:
            PyUnicode_DecodeUTF8(<const char*>text, size, "strict")
        except UnicodeDecodeError:
            return False
        return True


cdef bint read_debug(const uint8_t* p, const uint8_t* end, Cell* cell) noexcept nogil:
    """The text of a Debug message; of repeated fields the last one."""
    cdef uint32_t tag = 0
    cdef uint64_t size = 0
    cell.there = True
    while p < end:
        p = read_tag(p, end, &tag)
        if p == NULL or tag >> 3 == 0:
            return False
        if tag >> 3 != 1 or tag & 7 != LENGTH:
            p = skip_value(p, end, tag, 1)
            if p == NULL:
                return False
            continue
        p = read_size(p, end, &size)
        if p == NULL or size > <uint64_t>(end - p) or not is_utf8(p, size):
            return False
        cell.at = p
        cell.number = size
        p += size
    return True


cdef bint read_message(
    const uint8_t* p, const uint8_t* end, const uint8_t* kinds, int fields, Cell* cells
) noexcept nogil:
    """All fields of a message; False if it is invalid or a number too large for its column.

    The rules are those of `zkevm._wire`, which reports what is wrong.
    """
    cdef uint32_t tag = 0
    cdef uint64_t value = 0
    cdef uint64_t[2] words
    cdef int field, kind
    while p < end:
        p = read_tag(p, end, &tag)
        if p == NULL or tag >> 3 == 0:
            return False
        field = <int>(tag >> 3) - 1 if tag >> 3 <= <uint32_t>fields else fields
        kind = kinds[field] if field < fields else 0
        if not kind or tag & 7 != (LENGTH if kind >= BYTES else VARINT):
            p = skip_value(p, end, tag, 0)
            if p == NULL:
                return False
            continue
        if kind >= BYTES:
            p = read_size(p, end, &value)
            if p == NULL or value > <uint64_t>(end - p):
                return False
            if kind != DEBUG:
                cells[field].at = p
                cells[field].number = value
            elif not read_debug(p, p + value, &cells[field]):
                return False
            p += value
        else:
            p = read_varint(p, end, &value)
            if p == NULL:
                return False
            cells[field].number = value
    for field in range(fields):
        if kinds[field] == U64 and cells[field].number > <uint64_t>INT64_MAX:
            return False
        if kinds[field] == WEI and not read_wei(&cells[field], words):
            return False
    return True


cdef bint read_wei(const Cell* cell, uint64_t* words) noexcept nogil:
    """The two words, lower first, of a big-endian number; False if it has more than 38 digits."""
    cdef const uint8_t* p = cell.at
    cdef uint64_t size = cell.number
    while size and p[0] == 0:
        p += 1
        size -= 1
    if size > 16:
        return False
    words[1] = big_endian(p, <uint32_t>(size - 8)) if size > 8 else 0
    p += size - 8 if size > 8 else 0
    words[0] = big_endian(p, 8 if size > 8 else <uint32_t>size)
    return words[1] < WEI_END_HIGH or (words[1] == WEI_END_HIGH and words[0] < WEI_END_LOW)


cdef inline uint64_t big_endian(const uint8_t* p, uint32_t width) noexcept nogil:
    cdef uint64_t value = 0
    cdef uint32_t i
    for i in range(width):
        value = value << 8 | p[i]
    return value


cdef bint read_layout(
    const uint8_t* p, uint32_t size, const uint8_t* kinds, const FixedLayout* layouts, int count,
    Cell* cells
) noexcept nogil:
    """All values of data in the first layout that it fits; False if it fits none, a number is above
    2**63 - 1, or a bookmark has an unknown kind."""
    cdef int i, j
    cdef uint64_t more, value
    cdef const FixedLayout* layout = NULL
    cdef const Slot* slot
    cdef Cell* cell
    for i in range(count):
        layout = &layouts[i]
        if size >= layout.size:
            more = big_endian(p + layout.size_at, 4) if layout.size_at >= 0 else 0
            if size - layout.size == more:
                break
        layout = NULL
    if layout == NULL:
        return False
    for j in range(layout.slots):
        slot = &layout.slot[j]
        cell = &cells[slot.column]
        cell.there = True
        if kinds[slot.column] >= BYTES:
            cell.at = p + slot.at
            cell.number = slot.width
            continue
        value = big_endian(p + slot.at, slot.width)
        if value > <uint64_t>INT64_MAX:
            return False
        if kinds[slot.column] == ENUM:
            # The only enumeration: a bookmark's kind, 0 for a block and 1 for a batch.
            if value > 1:
                return False
            value = 2 - value
        cell.number = value
    if layout.size_at >= 0:
        cells[layout.tail].there = True
        cells[layout.tail].at = p + layout.size
        cells[layout.tail].number = size - layout.size
    return True


cdef int as_layouts(object given, FixedLayout* layouts, int columns) except -1:
    cdef int i, j
    if len(given) > MAX_LAYOUTS:
        raise ValueError(f"{len(given)} layouts")
    for i, (size, size_at, tail, slots) in enumerate(given):
        layouts[i].size, layouts[i].size_at, layouts[i].tail = size, size_at, tail
        layouts[i].slots = len(slots)
        if not 0 <= tail < columns or len(slots) > columns or size_at + 4 > size:
            raise ValueError(f"a layout of {size} bytes with {len(slots)} values")
        for j, (column, at, width) in enumerate(slots):
            if not 0 <= column < columns or at + width > size:
                raise ValueError(f"column {column} is {width} bytes at {at} of {size}")
            layouts[i].slot[j] = Slot(column, at, width)
    return 0


cdef void put(Target* target, Py_ssize_t row, const Cell* cell) noexcept nogil:
    cdef int kind = target.kind
    if kind == U64:
        (<int64_t*>target.values)[row] = <int64_t>cell.number
    elif kind == FULL_U64:
        (<uint64_t*>target.values)[2 * row] = cell.number
        (<uint64_t*>target.values)[2 * row + 1] = 0
    elif kind == WEI:
        read_wei(cell, <uint64_t*>target.values + 2 * row)
    elif kind == U32:
        (<int64_t*>target.values)[row] = <int64_t><uint32_t>cell.number
    elif kind == ENUM:
        (<int32_t*>target.values)[row] = <int32_t><uint32_t>cell.number
    elif kind == BOOL:
        # The row may have been written before, by an entry that was dropped.
        target.values[row >> 3] &= <char>~(1 << (row & 7))
        set_bit(target.values, row, cell.number != 0)
    else:
        target.sources[row] = cell.at
        target.offsets[row + 1] = <int32_t>cell.number
    if target.valid != NULL:
        target.valid[row >> 3] &= <char>~(1 << (row & 7))
        set_bit(target.valid, row, cell.there)


cdef int gather(Target* target, Py_ssize_t rows, uint64_t* total) noexcept nogil:
    """Turn lengths into offsets; False if they exceed 32 bits."""
    cdef Py_ssize_t row
    total[0] = 0
    target.offsets[0] = 0
    for row in range(rows):
        total[0] += <uint32_t>target.offsets[row + 1]
        if total[0] > <uint64_t>INT32_MAX:
            return False
        target.offsets[row + 1] = <int32_t>total[0]
    return True


def event_columns(batch, type, bytes kinds not None, bytes wanted not None, int bad_rows,
                  allocate, layouts=None):
    """The events among the entries of this type, as columns.

    `kinds` has the kind of each field in order, and may end with 9 for the entry's whole data;
    `wanted` has a 1 for each column to make. Data are messages, or in the first of `layouts` that
    fits: ``(size, size_at, tail, [(column, at, width), ...])``, where `size_at` is -1 for data of
    exactly `size` bytes, else the offset of a u32 with the number of bytes that follow for the
    column `tail`. `bad_rows` says what to do with an entry that is no such event: 0 ends the
    columns before it, 1 makes a row of nulls (except for its data), 2 skips it. `allocate` is as
    in `entry_columns`.

    Returns ``(rows, numbers, columns, valid, bad)``: the entry numbers (int64); for each wanted
    column ``(buffers, valid or None)``, where the buffers are values, or offsets and values;
    `valid`, the bits of columns without their own, or None if all rows are valid; and
    ``[(row, index in the batch)]`` of bad entries. Raises `UsageError` as `entry_columns` does.
    """
    cdef FixedLayout fixed[MAX_LAYOUTS]
    cdef int fixed_count = 0
    cdef BatchColumns columns
    cdef Py_buffer view
    cdef Target targets[MAX_COLUMNS]
    cdef Cell cells[MAX_COLUMNS]
    cdef uint32_t entry_type = as_type(type)
    cdef int count = <int>len(kinds), fields, at
    cdef Py_ssize_t i, row = 0, most = 0, bads = 0, size
    cdef Py_ssize_t* bad = NULL
    cdef const uint8_t* kind = <const uint8_t*>PyBytes_AS_STRING(kinds)
    cdef const uint8_t* data
    cdef bint good
    cdef uint64_t total
    columns_of(batch, &columns)
    if not 1 <= count <= MAX_COLUMNS or len(wanted) != count:
        raise ValueError(f"{count} columns, but {len(wanted)} flags")
    fields = count - 1 if kind[count - 1] == DATA else count
    if layouts is not None:
        fixed_count = <int>len(layouts)
        as_layouts(layouts, fixed, count)
    for i in range(columns.count):
        most += columns.types[i] == entry_type
    if columns.count and number_at(&columns, columns.count - 1) > <uint64_t>INT64_MAX:
        raise number_too_large(number_at(&columns, columns.count - 1))
    cdef bytes numbers = room(most * 8), valid = room((most + 7) // 8), part
    cdef int64_t* number = <int64_t*>PyBytes_AS_STRING(numbers)
    cdef char* ok = PyBytes_AS_STRING(valid)
    cdef list made = [None] * count
    cdef list sources = []  # keeps the arrays of pointers alive
    memset(ok, 0, (most + 7) // 8)
    for at in range(count):
        targets[at].kind = 0
        if not wanted[at]:
            continue
        targets[at].kind = kind[at]
        targets[at].valid = NULL
        valid_part = None
        # A field that one generation of a layout has, another lacks.
        if kind[at] == DEBUG or (fixed_count and kind[at] != DATA):
            valid_part = room((most + 7) // 8)
            targets[at].valid = PyBytes_AS_STRING(<bytes>valid_part)
            memset(targets[at].valid, 0, (most + 7) // 8)
        if kind[at] >= BYTES and kind[at] != WEI:
            part = room((most + 1) * 4)
            targets[at].offsets = <int32_t*>PyBytes_AS_STRING(part)
            made[at] = ([part], valid_part)
            part = room(most * sizeof(uint8_t*))
            targets[at].sources = <const uint8_t**>PyBytes_AS_STRING(part)
            sources.append(part)
        else:
            size = most * 8
            if kind[at] == BOOL:
                size = (most + 7) // 8
            elif kind[at] == ENUM:
                size = most * 4
            elif kind[at] == FULL_U64 or kind[at] == WEI:
                size = most * 16
            part = room(size)
            targets[at].values = PyBytes_AS_STRING(part)
            if kind[at] == BOOL:
                memset(targets[at].values, 0, size)
            made[at] = ([part], valid_part)
    bad = <Py_ssize_t*>malloc((2 * most + 1) * sizeof(Py_ssize_t))
    if bad == NULL:
        raise MemoryError
    try:
        with nogil:
            for i in range(columns.count):
                if columns.types[i] != entry_type:
                    continue
                data = columns.base + columns.offsets[i] + HEAD_SIZE
                memset(cells, 0, count * sizeof(Cell))
                if fixed_count:
                    good = read_layout(data, columns.lengths[i], kind, fixed, fixed_count, cells)
                else:
                    good = read_message(data, data + columns.lengths[i], kind, fields, cells)
                if not good:
                    bad[2 * bads] = row
                    bad[2 * bads + 1] = i
                    bads += 1
                    if bad_rows == STOP:
                        break
                    if bad_rows == DROP:
                        continue
                    memset(cells, 0, count * sizeof(Cell))
                if fields < count:
                    cells[fields].at = data
                    cells[fields].number = columns.lengths[i]
                number[row] = <int64_t>number_at(&columns, i)
                set_bit(ok, row, good)
                for at in range(count):
                    if targets[at].kind:
                        put(&targets[at], row, &cells[at])
                row += 1
        found = [(bad[2 * i], bad[2 * i + 1]) for i in range(bads)]
    finally:
        free(bad)
    for at in range(count):
        if targets[at].kind >= BYTES and targets[at].kind != WEI:
            if not gather(&targets[at], row, &total):
                raise too_many_bytes()
            values = allocate(total)
            targets[at].values = hold(values, &view, total)
            with nogil:
                for i in range(row):
                    copy(targets[at].values + targets[at].offsets[i], targets[at].sources[i],
                         <uint32_t>(targets[at].offsets[i + 1] - targets[at].offsets[i]))
            PyBuffer_Release(&view)
            made[at][0].append(values)
    return row, numbers, made, (valid if bads and bad_rows == KEEP else None), found
