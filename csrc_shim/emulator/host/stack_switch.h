/* Switches of the host thread from one stack to another: the mechanism below fibers. */
#ifndef OCP_EMULATOR_HOST_STACK_SWITCH_H
#define OCP_EMULATOR_HOST_STACK_SWITCH_H

/* Saves the callee-saved registers on the stack and the stack pointer in *save; resumes the fiber whose saved stack
 * pointer is `load`. */
void ocp_emu_switch(void **save, void *load);
/* Like ocp_emu_switch, but calls ocp_emu_fiber_main(fiber) of blocks/fiber.c on an empty stack. `stack_top` is a
 * multiple of 16. */
void ocp_emu_switch_new(void **save, void *stack_top, void *fiber);
/* Resumes the fiber whose saved stack pointer is `load`, without saving the state of the current fiber. */
_Noreturn void ocp_emu_switch_last(void *load);

#endif
