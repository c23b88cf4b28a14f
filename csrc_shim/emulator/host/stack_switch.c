#include "emulator/host/stack_switch.h"

#define FUNCTION(name, body)                                                                                           \
  ".p2align 4\n.hidden " name "\n.globl " name "\n.type " name ", %function\n" name ":\n" body ".size " name           \
  ", .-" name "\n"

/* ocp_emu_switch ends in a `ret`, which the CPU predicts rightly: most fibers resume at the call at which the switching
 * fiber stops. The other two functions change the call depth, so they jump. */
#if defined(__x86_64__)

#define PUSH "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
#define POP "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
__asm__(".text\n" FUNCTION("ocp_emu_switch", PUSH "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n" POP "  ret\n")
            FUNCTION("ocp_emu_switch_new", PUSH "  movq %rsp, (%rdi)\n  leaq -8(%rsi), %rsp\n  movq %rdx, %rdi\n"
                                                "  jmp ocp_emu_fiber_main\n")
                FUNCTION("ocp_emu_switch_last", "  movq %rdi, %rsp\n" POP "  popq %rcx\n  jmp *%rcx\n"));

#elif defined(__aarch64__)

#define ALL(instruction)                                                                                               \
  "  " instruction " x19, x20, [sp]\n  " instruction " x21, x22, [sp, #16]\n  " instruction                            \
  " x23, x24, [sp, #32]\n  " instruction " x25, x26, [sp, #48]\n  " instruction " x27, x28, [sp, #64]\n  " instruction \
  " x29, x30, [sp, #80]\n  " instruction " d8, d9, [sp, #96]\n  " instruction " d10, d11, [sp, #112]\n  " instruction  \
  " d12, d13, [sp, #128]\n  " instruction " d14, d15, [sp, #144]\n"
#define PUSH "  sub sp, sp, #160\n" ALL("stp")
#define POP ALL("ldp") "  add sp, sp, #160\n"
#define SAVE "  mov x9, sp\n  str x9, [x0]\n"
__asm__(".text\n" FUNCTION("ocp_emu_switch", PUSH SAVE "  mov sp, x1\n" POP "  ret\n")
            FUNCTION("ocp_emu_switch_new", PUSH SAVE "  mov sp, x1\n  mov x0, x2\n  mov x29, xzr\n  mov x30, xzr\n"
                                                     "  b ocp_emu_fiber_main\n")
                FUNCTION("ocp_emu_switch_last", "  mov sp, x0\n" POP "  br x30\n"));

#endif
