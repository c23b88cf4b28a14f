/* A plan: the launches, library calls and copies of one variant of a compiled cluster, as versioned plain data without
 * pointers.
 *
 * ort_cuda_plugin/plan/format.py writes this format, load.c checks every count, index and range of a plan (which may
 * come from an EP context file, so the library must not trust it before the check), and run/executor.c runs the plan.
 * All integers are little endian; a blob is the header followed by the arrays in the order of the header's counts, each
 * array 8-byte aligned.
 *
 * Sizes, strides, offsets and grids are registers: int64 values. Registers 0.. hold, in this order, the dimensions of
 * all inputs (input by input), then the host values of all host inputs (host_register); read-backs and expressions fill
 * the rest, each register once.
 *
 * A plan is a list of segments. A segment reads back the values it needs from the device (after synchronizing the
 * stream), evaluates its expressions, checks its assertions, allocates its outputs and its slab, and enqueues its
 * records. Nearly every plan has one segment and no read-back; an operator whose output size depends on data ends a
 * segment. Guards belong to the whole plan and may depend only on input dimensions and host inputs.
 *
 * OCP_PLAN_VERSION rises with every change that an older library would refuse or misunderstand. A library runs only
 * plans of its own version. Plans in files are without uploads: the process that loads a plan adds them
 * (ort_cuda_plugin/plan/streaming.py). */
#ifndef OCP_PLAN_FORMAT_H
#define OCP_PLAN_FORMAT_H

#include <stddef.h>
#include <stdint.h>

#define OCP_PLAN_MAGIC 0x4E4C504Fu /* "OPLN" */
#define OCP_PLAN_VERSION 5u
#define OCP_NO_REG 0xFFFFFFFFu
#define OCP_NO_NODE 0xFFFFFFFFu
#define OCP_MAX_RANK 16
#define OCP_MAX_REGISTERS (1u << 22)
#define OCP_MAX_HOST_VALUES 65536u /* elements of one host input or read-back */
#define OCP_MAX_LOOP_DEPTH 8u      /* maximum depth of nested loops */
#define OCP_MAX_LAUNCH_PARAMS 512u /* CUDA accepts 4096 bytes of parameters on every device */

typedef struct ocp_plan_header {
  uint32_t magic, version;
  uint32_t num_registers, num_inputs, num_outputs, num_weights, num_kernels, num_problems;
  uint32_t num_dims; /* length of the array of register indices that contains the outputs' shapes */
  uint32_t num_exprs, num_guards, num_asserts, num_readbacks, num_buffers, num_records, num_params, num_segments;
  uint32_t num_nodes;        /* the ONNX nodes that errors and profiles name */
  uint32_t strings_bytes;    /* NUL-terminated strings, referred to by offset */
  uint32_t num_record_nodes; /* length of the array of node indices that contains each record's nodes */
  uint32_t num_in_place;     /* pairs of an input and an output that may share memory */
  uint32_t reserved;
} ocp_plan_header;

/* A value that a Run passes to the cluster. Its dimensions are registers first_register .. first_register+rank-1. */
typedef struct ocp_plan_input {
  uint32_t dtype; /* ONNXTensorElementDataType */
  uint32_t rank;
  uint32_t first_register;
  uint32_t host_register; /* first register of its host values, or OCP_NO_REG: not a host input */
  uint32_t host_count; /* number of elements read; the plan matches only inputs with exactly that many; 0: none read */
  uint32_t reserved;
} ocp_plan_input;

/* Offsets into strings. A label is "name (op_type)". An entry that stands for no node has an empty type. */
typedef struct ocp_plan_node {
  uint32_t label, op_type;
} ocp_plan_node;

typedef struct ocp_plan_output {
  uint32_t dtype, rank;
  uint32_t first_dim; /* index into dims: rank register indices */
  uint32_t segment;   /* the segment that allocates the output */
  uint32_t node;      /* the node that computes the output, for errors, or OCP_NO_NODE */
  uint32_t reserved;
} ocp_plan_output;

typedef enum ocp_expr_op {
  OCP_EXPR_CONST = 0, /* dst = imm */
  OCP_EXPR_ADD = 1,
  OCP_EXPR_SUB = 2,
  OCP_EXPR_MUL = 3,
  OCP_EXPR_FLOORDIV = 4, /* floor, as Python's //; division by zero is an error of the Run */
  OCP_EXPR_MOD = 5,      /* sign of the divisor, as Python's % */
  OCP_EXPR_CEILDIV = 6,
  OCP_EXPR_MIN = 7,
  OCP_EXPR_MAX = 8,
  OCP_EXPR_EQ = 9, /* comparisons give 0 or 1 */
  OCP_EXPR_NE = 10,
  OCP_EXPR_LT = 11,
  OCP_EXPR_LE = 12,
  OCP_EXPR_AND = 13, /* logical: both nonzero */
  OCP_EXPR_OR = 14,
  OCP_EXPR_SELECT = 15,   /* dst = a != 0 ? b : c */
  OCP_EXPR_TRUNCDIV = 16, /* toward zero, as C's / */
  OCP_EXPR_NUM_OPS
} ocp_expr_op;

/* An operation with its operands. The Run fails if the arithmetic overflows int64. */
typedef struct ocp_plan_expr {
  uint32_t op;
  uint32_t dst; /* the register that only this expression defines; its index is higher than the operands' */
  uint32_t a, b, c;
  uint32_t segment; /* computed when that segment starts; the guards' expressions are in segment 0 */
  int64_t imm;
  uint32_t node; /* the first node that needs the value, for errors, or OCP_NO_NODE */
  uint32_t reserved;
} ocp_plan_expr;

typedef struct ocp_plan_assert {
  uint32_t reg;     /* must be nonzero, else the Run fails with the node's name and the message */
  uint32_t node;    /* index of the node */
  uint32_t message; /* offset into strings */
  uint32_t segment;
} ocp_plan_assert;

/* The kinds of memory that a parameter can point into. */
typedef enum ocp_ref_kind {
  OCP_REF_INPUT = 0,
  OCP_REF_OUTPUT = 1,
  OCP_REF_WEIGHT = 2,
  OCP_REF_BUFFER = 3
} ocp_ref_kind;

/* Elements that the host must read before a segment can start. */
typedef struct ocp_plan_readback {
  uint32_t ref_kind, ref_index;
  uint32_t byte_offset_register; /* or OCP_NO_REG */
  uint32_t dtype;                /* an integer type or bool */
  uint32_t count;
  uint32_t dst; /* first of count registers */
  uint32_t segment;
  uint32_t reserved;
} ocp_plan_readback;

/* Scratch or intermediate memory. A buffer lives from the first to the last record (inclusive) that names it. If its
 * last record is in a later segment than `segment`, or if a later segment reads it back, it lives to the end of the
 * Run. The executor gives each buffer an offset into the slab of its segment, so that buffers alive together do not
 * overlap. */
typedef struct ocp_plan_buffer {
  uint32_t size_register; /* bytes */
  uint32_t first_record, last_record;
  uint32_t segment;
} ocp_plan_buffer;

typedef enum ocp_record_kind {
  OCP_RECORD_LAUNCH = 0,  /* kernel `index` with params; skipped when a grid dimension is 0 */
  OCP_RECORD_COPY = 1,    /* params: dst, src, bytes (I64); device to device */
  OCP_RECORD_MEMSET = 2,  /* params: dst, byte value (I32), bytes (I64) */
  OCP_RECORD_LIBRARY = 3, /* library problem `index` with params; see vendor/problem.h */
  OCP_RECORD_CALL = 4,    /* callback `index` of the cluster, in Python; pointers and I64 numbers; never in a graph */
  /* Repeats the next `index` records while the int32 at its first parameter, a pointer, is nonzero. The segment
   * contains these records; loops nest. In a CUDA graph, a WHILE node repeats them, and kernels also set its condition
   * (see OCP_PARAM_CONDITION). Otherwise the host reads the int32 before each iteration. If there is a second parameter
   * (I64), it is the number of iterations, and the host reads nothing. */
  OCP_RECORD_LOOP = 5,
  /* params: dst (a buffer), src (a weight in pinned host memory), bytes (I64, a constant). Copies the weight on the
   * copy stream, after all earlier records. No other record or read-back names a weight in host memory. */
  OCP_RECORD_UPLOAD = 6,
  /* Makes the later records wait for the upload that is record `index`, in the same segment. Each upload is awaited
   * once, in the order of the uploads. An await takes no params. Uploads and awaits run
   * unconditionally. */
  OCP_RECORD_AWAIT = 7,
  OCP_RECORD_NUM_KINDS
} ocp_record_kind;

typedef struct ocp_plan_record {
  uint32_t kind;
  uint32_t node;
  uint32_t index; /* of a kernel, problem, callback or awaited upload; LOOP: number of records that it repeats */
  uint32_t segment;
  uint32_t first_param, num_params;
  uint32_t grid[3];               /* registers */
  uint32_t block[3];              /* values, not registers */
  uint32_t shared_register;       /* bytes of dynamic shared memory; OCP_NO_REG: 0 bytes */
  uint32_t condition_register;    /* the record is skipped when this register is 0; OCP_NO_REG: never */
  uint32_t first_node, num_nodes; /* in record_nodes: all nodes that the record computes; errors name `node` */
} ocp_plan_record;

typedef enum ocp_param_kind {
  OCP_PARAM_POINTER = 0,
  OCP_PARAM_I32 = 1,
  OCP_PARAM_I64 = 2,
  OCP_PARAM_F32 = 3, /* `imm` holds the bits */
  OCP_PARAM_F64 = 4,
  OCP_PARAM_I8 = 5,
  OCP_PARAM_I16 = 6,
  OCP_PARAM_CONDITION = 7, /* 64 bits: handle of the WHILE node of the loop record `imm`; 0 outside of a CUDA graph */
  OCP_PARAM_NUM_KINDS
} ocp_param_kind;

/* The executor checks that each pointer lies within the memory that its ref names, or at the end of that memory, and
 * that copies and memsets stay within that memory. */
typedef struct ocp_plan_param {
  uint32_t kind;
  uint32_t ref_kind;  /* for POINTER */
  uint32_t ref_index; /* for POINTER */
  uint32_t reg;       /* POINTER: register of the byte offset, or OCP_NO_REG; integers: register, or OCP_NO_REG: imm */
  int64_t imm;        /* POINTER: constant byte offset, added to that in the register; else the value */
} ocp_plan_param;

typedef struct ocp_plan_segment {
  uint32_t first_record, num_records;
} ocp_plan_segment;

/* Reasons why a record may read an input and write an output in the same memory. */
typedef enum ocp_in_place_kind {
  OCP_IN_PLACE_ELEMENTS = 0, /* each element is read before it is written, and by the thread that writes it */
  OCP_IN_PLACE_KEPT = 1,     /* the bytes that the plan reads keep their values: rows are appended to a cache */
  OCP_IN_PLACE_NUM_KINDS
} ocp_in_place_kind;

/* An input and an output that may begin at one address if they have the same number of bytes. The first record that
 * names the output is the last record that names the input. If the first record that names an output comes after all
 * records that name an input, the two may share any memory and need no pair. A record in a loop counts as if it were at
 * the loop's beginning and at its end. */
typedef struct ocp_plan_in_place {
  uint32_t input, output;
  uint32_t kind;
  uint32_t reserved;
} ocp_plan_in_place;

/* exprs, asserts, readbacks and records are ordered by segment; the dims of outputs and the params and nodes of records
 * follow each other without gaps, in the order of outputs and records. The pairs of in_place are sorted by output, then
 * by input. The order of the arrays: inputs, outputs, weights, kernels and problems (uint32_t indices into the arrays
 * of the cluster), dims (uint32_t), exprs, guards (uint32_t registers that must be nonzero), asserts, readbacks,
 * buffers, records, params, segments, nodes, record_nodes (uint32_t), in_place, strings. */

#endif
